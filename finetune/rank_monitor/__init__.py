"""Ends every rank with one message when one of them dies."""
