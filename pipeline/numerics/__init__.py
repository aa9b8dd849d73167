"""Pure tensor functions of the image track, one topic per file: no settings, no records, no files."""
