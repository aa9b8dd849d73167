"""Evalsets: cards, cases and pictures, as they lie in their folders."""
