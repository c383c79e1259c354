"""The variable that names the folder of a run's traces; read before anything of ours is loaded."""

FOLDER = "MESHWRIGHT_TESTS_TRACES"
