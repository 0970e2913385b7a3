"""How text and files of users and peers are read and printed."""
