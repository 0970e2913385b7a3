"""Private parts of a party: settings, credentials, data, status over HTTP, command line."""
