"""The engines that serve candidates: one file each, one way to start them all (`registry.start_engine`)."""
