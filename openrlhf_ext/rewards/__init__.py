"""Grading of completions by user code, in processes that can be stopped. Grading workers import
this: nothing here."""
