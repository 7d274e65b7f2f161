"""The headless node: holds expert slices and answers dispatches, like the page in a browser tab."""
