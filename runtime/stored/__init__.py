"""A checkpoint on disk: its folder, its manifest, its part files, and torch's older form."""
