"""Tools for this repository's maintainers; no part of the installed package."""
