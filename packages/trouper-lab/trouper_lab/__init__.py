"""`trouper certify` and `trouper bench`, which join the CLI as entry points of
`trouper.commands`."""
