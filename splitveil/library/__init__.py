"""The library for notebooks and programs, which import its parts from `splitveil`."""
