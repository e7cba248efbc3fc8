"""Web application, access control and error responses."""
