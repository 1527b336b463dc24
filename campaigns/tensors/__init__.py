"""Campaigns on tensors: trained weights to measure, and how they are had."""
