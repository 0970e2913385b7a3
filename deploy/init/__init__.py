"""Looks at a party's own table and writes the settings that fit it: ``splitveil init``."""
