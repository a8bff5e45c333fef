"""The sections of the page: functions that take the results and return a section, or None.

To add one, write such a function in its own file and add it to the list in page.py.
"""
