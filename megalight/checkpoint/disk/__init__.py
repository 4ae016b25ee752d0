"""A checkpoint's folder: files and their checksums, the index, the manifest, and the life of the folder. No torch."""
