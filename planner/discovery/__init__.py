"""Rules of ops that no family knows, found by trying: run whole and in parts, keep what agrees."""
