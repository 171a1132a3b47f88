from rankattn_cli.main import main


main()
