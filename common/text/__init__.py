"""Reading and printing of text and files that come from users and peers."""
