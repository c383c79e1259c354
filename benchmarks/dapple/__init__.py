"""DAPPLE's published figures and plans."""
