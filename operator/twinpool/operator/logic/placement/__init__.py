"""Where serving groups go: whole groups or nothing, near what they talk to, or the reason why not."""
