"""What an ordinary client can do to others, as scripts. See run.py."""
