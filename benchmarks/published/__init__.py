"""Predicts published training runs with our cost model and reports the error."""
