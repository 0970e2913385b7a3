"""Private parts of a party: settings, credentials, data, transcript and command line."""
