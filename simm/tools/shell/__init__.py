"""What a shell shows of the ``simm`` command: its manual page, and completions."""
