"""What looks after the repository itself: its locks and their audit."""
