"""Evaluate a candidate: one eval per file, one signature, driven case by case through one client."""
