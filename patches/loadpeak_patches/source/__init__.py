"""The release as a source patch, for people who maintain a fork of vLLM."""
