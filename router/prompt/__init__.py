"""From the body of a request to what routing needs: the tokens of its prompt, or its text."""
