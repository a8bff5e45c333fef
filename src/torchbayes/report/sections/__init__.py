"""The sections of the page: functions that take the results and give a section, or None.

To add one, write such a function in a file of its own and put it in the list of page.py.
"""
