"""Step times that no plan can beat."""
