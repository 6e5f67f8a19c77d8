"""Transcripts of files: words, segments and subtitles."""
