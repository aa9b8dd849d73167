"""Pure tensor functions of the image product, one topic per file: no settings, no records, no files."""
