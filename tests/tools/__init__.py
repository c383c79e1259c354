"""Tests of `meshwright.tools`."""
