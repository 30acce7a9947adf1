"""Tests of eaglehs; the folders mirror the package."""
