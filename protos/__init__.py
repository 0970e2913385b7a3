"""The wire between the parties; the generated code is checked in and never edited."""
