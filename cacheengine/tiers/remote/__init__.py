"""The remote tier: any store of blobs behind it, checked envelopes, outages waited out."""
