"""Turns text, chats and instructions into a SlideDP token dataset."""
