"""Serve a candidate and talk to it: engines, the launcher that each embedded server runs, the one client."""
