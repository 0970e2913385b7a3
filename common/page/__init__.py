"""The HTML page that all reports share: its frame, its style sheet, and how it is rendered."""
