"""What a party keeps to itself: settings, credentials, data, transcript, command line."""
