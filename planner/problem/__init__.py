"""What a search is given, the choices it has, and the plans that they stand for."""
