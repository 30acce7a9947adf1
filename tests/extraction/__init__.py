"""Tests of eaglehs.extraction."""
