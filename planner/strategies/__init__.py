"""One file per op family: how its ops can be split over a mesh axis."""
