"""Everything that holds Headrace to its promises; CONTRIBUTING.md says which folder is for what."""
