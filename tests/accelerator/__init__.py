"""Tests of what runs on another device than the CPU, and what they are made with."""
