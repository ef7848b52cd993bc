"""Calls drawn at random on the native engine, each checked against what is right. See drive.py."""
