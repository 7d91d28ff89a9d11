"""Typed settings of every command: their parsers, where they come from, and what each command does at start.

Reads flags, the environment and the configuration file. Opens nothing but the log and the token file.
"""
