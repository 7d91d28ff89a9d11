"""What a data server does for operators: reports for the manager's page, settings at run time, the admin socket."""
