"""`trouper certify` and `trouper bench`, entry points of `trouper.commands`."""
