"""Tests of SiMM: CONTRIBUTING.md says what each folder has."""
