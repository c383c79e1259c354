"""Checkpoints: what ranks hold, files on disk, loading under any plan."""
