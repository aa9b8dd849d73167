"""What lies on disk between stages: typed records, their files, digests and fingerprints."""
