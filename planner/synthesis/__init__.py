"""Schedules made for given stage times and memory, where the files of `schedules` do not fit."""
